"""What the author of an engine writes to let it sleep: `python examples/custom_engine.py`."""

import torch

import hal
from hal.core import SleepManager
from hal.pools import torch_device

platform = hal.detect()  # or hal.detect("cpu"); HAL_PLATFORM decides without a change here
sleeper = SleepManager(platform, device=0)
device = torch_device(platform, 0)

# Everything an engine allocates belongs to a pool; its tag says what a sleep does to it.
with sleeper.pool("weights"), device:
    model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.Linear(4096, 1024))
with sleeper.kv_init() as kv:
    with kv.cache():  # the cache's backing allocation and nothing else
        cache = kv.declare(torch.zeros(2, 64 * 1024, 64, device=device))
    block_tables = torch.arange(256, device=device)  # unlike the cache, it outlives a sleep
sleeper.after_wake(lambda: print("the cache is empty again: forget its index"), tag="kv_cache")

prompt = torch.ones(1, 1024, device=device)
before, address = model(prompt), model[0].weight.data_ptr()

print(f"a sleep would free {sleeper.plan_sleep(level=1).freed >> 20} MiB")
print(sleeper.sleep(level=1))
try:
    sleeper.require_awake("weights")  # an engine asks before each step
except hal.AsleepError as error:
    print(f"not now: {error}")

print(sleeper.wake_up("weights"))  # the cache stays asleep: room for loading new weights
print(sleeper.wake_up())

same = torch.equal(before, model(prompt)) and torch.equal(block_tables.cpu(), torch.arange(256))
print("bit-exact" if same and address == model[0].weight.data_ptr() else "damaged")
