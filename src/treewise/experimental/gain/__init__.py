"""Practising tasks by the angles of their prompts: what measures them, and checks whether they tell anything."""
