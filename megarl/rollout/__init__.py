"""Generation on SGLang servers, which run as subprocesses."""
