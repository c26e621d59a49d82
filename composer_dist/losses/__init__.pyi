from .chunked import chunked_cross_entropy as chunked_cross_entropy
