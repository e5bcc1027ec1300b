"""OpenAI's Responses: ``/v1/responses``."""
