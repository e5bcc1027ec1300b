"""The chat screen and its parts: conversation view, composer, menu, live panel, footer."""
