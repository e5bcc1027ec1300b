"""The terminal app, conversations, the server, and the start-up of the command line."""
