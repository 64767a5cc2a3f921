"""Chats to token rows, by the chat template of the model."""
