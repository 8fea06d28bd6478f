"""`clipstream search RUN DATA QUERY`: images of a data set by texts and images, with an index in the cache."""
