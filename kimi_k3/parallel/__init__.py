"""Several devices: the mesh, tensor and expert parallelism, and where each expert's copies lie."""
