! burgers.f90: a solver with MPI that trains a network on its own fields while it runs, without dtrain.
!
! Burgers' equation, u_t + u u_x = nu u_xx, on a ring of cells that the ranks divide. A block is a few steps of
! the solver; from the fields before and after it the network learns the rate of change of a cell: the cell and
! its slopes -> 16 tanh -> 1. Every rank has another network, which sees the cells of the rank only:
! burgers_dtrain.f90 trains one network on the cells of all ranks.
!
!     mpif90 -O2 burgers.f90 -o burgers
!     mpirun -n 2 ./burgers fields 400        # 400 blocks; writes fields/u-000100.bin and so on
!     mpirun -n 3 ./burgers fields 600 400    # continues from fields/u-000400.bin, with a new network
program burgers
  use mpi
  use, intrinsic :: iso_fortran_env, only: real64
  implicit none
  integer, parameter :: cells = 240, hidden = 16, steps = 4, every = 100
  real(real64), parameter :: nu = 0.005_real64, dx = 1.0_real64 / cells, dt = 0.001_real64
  real(real64), parameter :: rate = 0.0625_real64, momentum = 0.875_real64
  real(real64), dimension(3, hidden) :: w1, dw1, vw1 = 0
  real(real64), dimension(hidden) :: b1, db1, vb1 = 0, w2, dw2, vw2 = 0
  real(real64), dimension(1) :: b2, db2, vb2 = 0
  real(real64), allocatable :: u(:), before(:), x(:, :), y(:)
  real(real64) :: loss
  integer :: rank, ranks, mine, block, first, blocks, error, i
  character(256) :: folder, word

  call MPI_Init(error)
  call MPI_Comm_rank(MPI_COMM_WORLD, rank, error)
  call MPI_Comm_size(MPI_COMM_WORLD, ranks, error)
  if (command_argument_count() < 2 .or. mod(cells, ranks) /= 0) then
    if (rank == 0) print '(a, i0, a)', 'usage: burgers FOLDER BLOCKS [FIRST], on a number of ranks that divides ', cells, ' cells'
    call MPI_Abort(MPI_COMM_WORLD, 1, error)
  end if
  call get_command_argument(1, folder)
  call get_command_argument(2, word)
  read (word, *) blocks
  mine = cells / ranks
  allocate (u(0:mine + 1), before(0:mine + 1), x(3, mine), y(mine))
  do i = 1, hidden
    w1(:, i) = sin([1, 2, 3] * 1.7_real64 * i)
    w2(i) = 0.25_real64 * sin(0.9_real64 * i)
  end do
  b1 = 0
  b2 = 0
  first = 0
  if (command_argument_count() > 2) then
    call get_command_argument(3, word)
    read (word, *) first
  end if
  call begin(first)

  do block = first + 1, blocks
    before = u
    do i = 1, steps
      call step()
    end do
    x(1, :) = (before(1:mine) - before(0:mine - 1)) / (8 * dx)
    x(2, :) = before(1:mine) - 1
    x(3, :) = (before(2:mine + 1) - before(1:mine)) / (8 * dx)
    y = (u(1:mine) - before(1:mine)) / (8 * steps * dt)
    call train()
    if (mod(block, every) == 0) then
      if (rank == 0) print '(a, i0, a, es22.15)', 'block ', block, ' loss ', loss
      call write_field(block)
    end if
  end do
  call MPI_Finalize(error)

contains

  ! One step of the network: the mean square error over the cells, its gradients, SGD with momentum.
  subroutine train()
    real(real64) :: h(hidden, mine), dh(hidden, mine), e(mine)
    h = tanh(matmul(transpose(w1), x) + spread(b1, 2, mine))
    e = matmul(w2, h) + b2(1) - y
    loss = sum(e**2) / mine
    e = 2 * e / mine
    dw2 = matmul(h, e)
    db2 = sum(e)
    dh = spread(w2, 2, mine) * spread(e, 1, hidden) * (1 - h**2)
    dw1 = matmul(x, transpose(dh))
    db1 = sum(dh, 2)
    call update(w1, dw1, vw1)
    call update(b1, db1, vb1)
    call update(w2, dw2, vw2)
    call update(b2, db2, vb2)
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

  ! The neighbours' cells at both ends.
  subroutine exchange()
    integer :: left, right
    left = mod(rank + ranks - 1, ranks)
    right = mod(rank + 1, ranks)
    call MPI_Sendrecv(u(mine), 1, MPI_DOUBLE_PRECISION, right, 0, u(0), 1, MPI_DOUBLE_PRECISION, left, 0, &
                      MPI_COMM_WORLD, MPI_STATUS_IGNORE, error)
    call MPI_Sendrecv(u(1), 1, MPI_DOUBLE_PRECISION, left, 1, u(mine + 1), 1, MPI_DOUBLE_PRECISION, right, 1, &
                      MPI_COMM_WORLD, MPI_STATUS_IGNORE, error)
  end subroutine

  ! The field at the beginning, or that of a file.
  subroutine begin(from)
    integer, intent(in) :: from
    real(real64) :: whole(cells)
    integer :: unit
    whole = [(sin(6.283185307179586_real64 * dx * i), i = 1, cells)]
    whole = 1 + whole / 2 + whole**3
    if (from > 0) then
      open (newunit=unit, file=field_name(from), access='stream', form='unformatted', status='old')
      read (unit) whole
      close (unit)
    end if
    u(1:mine) = whole(rank * mine + 1:rank * mine + mine)
    call exchange()
  end subroutine

  subroutine write_field(at)
    integer, intent(in) :: at
    real(real64) :: whole(cells)
    integer :: unit
    call MPI_Gather(u(1), mine, MPI_DOUBLE_PRECISION, whole, mine, MPI_DOUBLE_PRECISION, 0, MPI_COMM_WORLD, error)
    if (rank /= 0) return
    open (newunit=unit, file=field_name(at), access='stream', form='unformatted', status='replace')
    write (unit) whole
    close (unit)
  end subroutine

  function field_name(at) result(name)
    integer, intent(in) :: at
    character(:), allocatable :: name
    character(6) :: digits
    write (digits, '(i6.6)') at
    name = trim(folder) // '/u-' // digits // '.bin'
  end function
end program
