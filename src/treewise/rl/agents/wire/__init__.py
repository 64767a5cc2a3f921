"""The protocols: requests to `Asked`, replies to answers and events. Pure functions of plain values."""
