"""What a machine with a GPU, torch and no network needs to check megarl's engine: packed here, used there."""
