"""The parts of a decoder layer, one file each."""
