// In place of torch's header of this name: the stand-in includes by itself the kernels that it calls.
#pragma once
