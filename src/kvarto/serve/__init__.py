"""The HTTP server: OpenAI's interface over an engine. Clients speak `protocol`, the engine speaks `engine.engine.Ask`, and `app` stands between."""
