"""Windows over the chat: models, settings, conversations, help, small dialogs."""
