"""The exchange on devices: bulk bytes over a process group of torch.distributed, everything else over TCP."""
