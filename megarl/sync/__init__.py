"""Weights from the actor to the servers, and the proof that they arrived."""
