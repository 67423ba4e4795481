"""An OpenAI-compatible endpoint in front of the servers: agents that know nothing of megarl play episodes through it."""
