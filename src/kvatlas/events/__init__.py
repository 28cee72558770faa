"""How events travel and are kept: codec, subjects, order, bus, archive, replay."""
