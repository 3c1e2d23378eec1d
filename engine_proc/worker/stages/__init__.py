"""Pipeline parallelism: a worker has some of the layers, and passes hidden states on."""
