"""Takes all memory, and holds on to it."""

kept = []
while True:
    try:
        kept.append(bytearray(64 << 20))
    except MemoryError:
        kept.append(b"x")
