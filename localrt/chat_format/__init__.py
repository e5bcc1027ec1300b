"""What an answer's text means: tool calls, thinking, structured answers."""
