"""`clipstream search TOPIC STORE`, in stores of features: neighbours, near-duplicates, clusters, scores, doubt."""
