"""Episodes of several turns: environments, tools, and what they and the policy said as token ids. No Ray, no torch, no engine."""
