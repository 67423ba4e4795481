"""Measures a machine for the planner: small reference models on real ranks and a real server. Not for training anything."""
