"""The training job: a small mixture-of-experts language model over a pipeline of stages."""
