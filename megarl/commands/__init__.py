"""The commands, one file each: their options, and a call of what does the work.

What is heavy is imported when a command is called, so that `megarl --help` and a refusal take no longer than they must.
"""
