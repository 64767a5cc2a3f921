"""The protocols: requests to `AgentRequest`, replies to answers and events. Pure functions of plain values."""
