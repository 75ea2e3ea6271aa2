"""Wire types: what clients send and get. Knows neither the web server nor the engine."""
