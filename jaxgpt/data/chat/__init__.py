"""Conversations and their chat templates: from messages to ids and targets."""
