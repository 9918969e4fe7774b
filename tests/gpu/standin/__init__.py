"""A stand-in for a CUDA device: tensors that say `cuda:0` and are computed by the CPU.

    import torch
    from standin.device import gpu
    ...  # everything else that is imported
    with gpu():
        torch.zeros(3, device="cuda")

What it sees: every operation of torch on the "GPU", in forward and backward passes, as values. As on a GPU these are
errors, with the line that made them: tensors of both devices in one operation, a generator of the wrong device, numpy
of a tensor on the GPU, a second GPU. It counts what makes the CPU wait and what is copied between the devices
(`standin.events`), by line.

What it cannot see: races (all is computed at once, in order: a result that is read before its copy has ended is right
here), memory, kernels and their numbers in reduced precision, the speed of anything, NCCL and more than one GPU, FSDP
on CUDA, bitsandbytes. Its CUDA graphs repeat operations on the same memory (`standin.graphs`), so that they show what a
graph fixes and refuses, not how a driver records it.

It changes torch for the whole process and is not undone: tests use it in processes of their own.
"""
