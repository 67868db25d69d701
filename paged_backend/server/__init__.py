"""The OpenAI HTTP API over one or several models: `paged-backend serve MODEL ...`."""
