"""SGLang's flags for caches beyond a server. In a file by itself: who only asks a server for them loads no recipe."""

# By these SGLang 0.5.21 keeps keys and values, by their tokens alone, in a store that it does not empty with its cache: those of
# the weights before, and of another run's, would be taken for these weights'. The fourth knows flexkv alone.
STORES = (
    "--hicache-storage-backend",
    "--enable-lmcache",
    "--enable-flexkv",
    "--radix-cache-backend",
    "--enable-unified-cache-external-linker",
)
