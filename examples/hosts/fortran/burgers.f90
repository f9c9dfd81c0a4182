! burgers.f90: a solver with MPI that trains a network on its own fields while it runs, without dtrain.
!
! Burgers' equation, u_t + u u_x = nu u_xx, on a ring of cells that the ranks divide. A block is a few steps of
! the solver; from the fields before and after it the network learns the rate of change of a cell: the cell, its
! slopes and a constant -> 16 tanh -> 1. The field is saved after every 100 blocks, and a run continues from it.
! Every rank trains another network, which sees the cells of this rank only; networks are not saved.
!
!     mpif90 -O2 burgers.f90 -o burgers
!     mkdir run; mpirun -n 2 ./burgers run 400    # up to block 400
!     mpirun -n 3 ./burgers run 600               # from there on other ranks
program burgers
  use mpi
  use, intrinsic :: iso_fortran_env, only: real64, int64, error_unit
  implicit none
  integer, parameter :: cells = 240, hidden = 16, steps = 4, every = 100
  real(real64), parameter :: nu = 0.005_real64, dx = 1.0_real64 / cells, dt = 0.001_real64
  real(real64), parameter :: rate = 0.0625_real64, momentum = 0.875_real64
  real(real64), dimension(4, hidden) :: w1, dw1, v1 = 0 ! weights, gradients, velocities
  real(real64), dimension(hidden) :: w2, dw2, v2 = 0
  real(real64), allocatable :: u(:), before(:), x(:, :), y(:)
  real(real64) :: loss, mean_loss
  integer(int64) :: block, first, last
  integer :: rank, ranks, mine, error, i
  character(256) :: folder, word

  call MPI_Init(error)
  call MPI_Comm_rank(MPI_COMM_WORLD, rank, error)
  call MPI_Comm_size(MPI_COMM_WORLD, ranks, error)
  if (command_argument_count() /= 2 .or. mod(cells, ranks) /= 0) &
    call fail('usage: burgers FOLDER BLOCKS, on 1, 2, 3, 4, 5, 6 or 8 ranks')
  call get_command_argument(1, folder)
  call get_command_argument(2, word)
  read (word, *) last
  mine = cells / ranks
  allocate (u(0:mine + 1), before(0:mine + 1), x(4, mine), y(mine))
  do i = 1, hidden
    w1(:, i) = [1, 1, 1, 0] * sin([1, 2, 3, 4] * 1.7_real64 * i)
    w2(i) = 0.25_real64 * sin(0.9_real64 * i)
  end do
  call read_field(first)

  do block = first + 1, last
    before = u
    do i = 1, steps
      call step()
    end do
    x(1, :) = (before(1:mine) - before(0:mine - 1)) / (8 * dx)
    x(2, :) = before(1:mine) - 1
    x(3, :) = (before(2:mine + 1) - before(1:mine)) / (8 * dx)
    x(4, :) = 1
    y = (u(1:mine) - before(1:mine)) / (8 * steps * dt)
    call train()
    if (mod(block, every) > 0) cycle
    call MPI_Allreduce(loss, mean_loss, 1, MPI_DOUBLE_PRECISION, MPI_SUM, MPI_COMM_WORLD, error)
    if (rank == 0) print '(a, i0, a, es22.15)', 'block ', block, ' loss ', mean_loss / ranks
    call write_field(block)
  end do
  call MPI_Finalize(error)

contains

  subroutine fail(text)
    character(*), intent(in) :: text
    write (error_unit, '(a)') text
    call MPI_Abort(MPI_COMM_WORLD, 1, error)
  end subroutine

  ! One step of the network: the mean square error over the cells, its gradients, SGD with momentum.
  subroutine train()
    real(real64) :: h(hidden, mine), dh(hidden, mine), e(mine)
    h = tanh(matmul(transpose(w1), x))
    e = matmul(w2, h) - y
    loss = sum(e**2) / mine
    e = 2 * e / mine
    dw2 = matmul(h, e)
    dh = spread(w2, 2, mine) * spread(e, 1, hidden) * (1 - h**2)
    dw1 = matmul(x, transpose(dh))
    call update(w1, dw1, v1)
    call update(w2, dw2, v2)
  end subroutine

  elemental subroutine update(value, gradient, velocity)
    real(real64), intent(inout) :: value, velocity
    real(real64), intent(in) :: gradient
    velocity = momentum * velocity + gradient
    value = value - rate * velocity
  end subroutine

  ! One step of the solver: conservative, central, explicit.
  subroutine step()
    real(real64) :: flux(0:mine)
    flux = (u(0:mine)**2 + u(1:mine + 1)**2) / 4 - nu * (u(1:mine + 1) - u(0:mine)) / dx
    u(1:mine) = u(1:mine) - dt / dx * (flux(1:mine) - flux(0:mine - 1))
    call exchange()
  end subroutine

  ! Receive the neighbours' cells at both ends.
  subroutine exchange()
    integer :: left, right
    left = mod(rank + ranks - 1, ranks)
    right = mod(rank + 1, ranks)
    call MPI_Sendrecv(u(mine), 1, MPI_DOUBLE_PRECISION, right, 0, u(0), 1, MPI_DOUBLE_PRECISION, left, 0, &
                      MPI_COMM_WORLD, MPI_STATUS_IGNORE, error)
    call MPI_Sendrecv(u(1), 1, MPI_DOUBLE_PRECISION, left, 1, u(mine + 1), 1, MPI_DOUBLE_PRECISION, right, 1, &
                      MPI_COMM_WORLD, MPI_STATUS_IGNORE, error)
  end subroutine

  ! Read the field of an earlier run and the number of its last block, or begin with block 0.
  subroutine read_field(at)
    integer(int64), intent(out) :: at
    real(real64) :: whole(cells)
    integer :: unit, missing
    at = 0
    whole = [(sin(6.283185307179586_real64 * dx * i), i = 1, cells)]
    whole = 1 + whole / 2 + whole**3
    open (newunit=unit, file=trim(folder) // '/field', access='stream', form='unformatted', status='old', iostat=missing)
    if (missing == 0) then
      read (unit) at, whole
      close (unit)
    end if
    u(1:mine) = whole(rank * mine + 1:rank * mine + mine)
    call exchange()
  end subroutine

  ! Write the whole field, first to another file, so that there is one at any moment.
  subroutine write_field(at)
    integer(int64), intent(in) :: at
    real(real64) :: whole(cells)
    integer :: unit
    call MPI_Gather(u(1), mine, MPI_DOUBLE_PRECISION, whole, mine, MPI_DOUBLE_PRECISION, 0, MPI_COMM_WORLD, error)
    if (rank /= 0) return
    open (newunit=unit, file=trim(folder) // '/field.new', access='stream', form='unformatted', status='replace', iostat=error)
    if (error /= 0) call fail('the field cannot be written to ' // trim(folder))
    write (unit) at, whole
    close (unit)
    call rename(trim(folder) // '/field.new', trim(folder) // '/field')
  end subroutine
end program
