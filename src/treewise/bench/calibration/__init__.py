"""A minute of one device: what its products, attention, element-wise kernels, launches and copies take, kept by card.

`measure` measures, `rates` keeps it, and says what an operation takes by it. `treewise doctor --gpu --calibrate` and
`make gpu` write one; `benchmarks/predict_gpu.py` predicts steps from it.
"""
