"""Other trainers on trees."""
