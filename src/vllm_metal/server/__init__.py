"""HTTP in front of the engines: routes, middlewares, server-sent events, the daemon's life."""
