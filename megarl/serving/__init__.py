"""SGLang servers and the router in front of them, as processes and as clients: all that knows an engine."""
