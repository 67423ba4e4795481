"""A run, from its recipe to its results: what is refused before, what is put together, how it begins and ends."""
