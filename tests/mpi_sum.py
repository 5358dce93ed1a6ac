"""A program of MPI itself, by libmpi's C interface: every rank has 10 and its number, and says the sum of all."""

import ctypes
import os
from pathlib import Path

# Open MPI says where it lies; the mpirun of a test is first on PATH, or lies beside Python.
folders = [Path(os.environ["PATH"].split(os.pathsep)[0]).parent, Path("/opt/pytorch")]
library = next(path for folder in folders for path in folder.glob("lib/libmpi.so.*"))
mpi = ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)


def constant(name):
    """The address of one of Open MPI's objects, which is what mpi.h calls MPI_COMM_WORLD, MPI_INT, ..."""
    return ctypes.c_void_p(ctypes.addressof(ctypes.c_char.in_dll(mpi, name)))


def must(code):
    assert code == 0, code


world = constant("ompi_mpi_comm_world")
rank, size, total = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
must(mpi.MPI_Init(None, None))
must(mpi.MPI_Comm_rank(world, ctypes.byref(rank)))
must(mpi.MPI_Comm_size(world, ctypes.byref(size)))
assert (rank.value, size.value) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
mine = ctypes.c_int(10 + rank.value)
pointers = (ctypes.byref(mine), ctypes.byref(total))
must(mpi.MPI_Allreduce(*pointers, ctypes.c_int(1), constant("ompi_mpi_int"), constant("ompi_mpi_op_sum"), world))
print(f"MPI: rank {rank.value} of {size.value}, sum {total.value}", flush=True)
must(mpi.MPI_Finalize())
