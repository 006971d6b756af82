"""Operations of torch on the device "opencl", a file a family."""
