"""What attention and models stand on: tensors between host and device, memory, releases, errors of compilers."""
