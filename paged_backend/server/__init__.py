"""The OpenAI HTTP API over one `LLM`: `paged-backend serve MODEL`."""
