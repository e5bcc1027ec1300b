"""Models with recurrent layers and per-layer embeddings, beside llama.cpp and ik_llama.cpp."""
