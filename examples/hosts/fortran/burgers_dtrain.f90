! burgers_dtrain.f90: burgers.f90, in which all ranks train one network, data-parallel.
!
! Burgers' equation, u_t + u u_x = nu u_xx, on a ring of cells that the ranks divide. A block is a few steps of
! the solver; from the fields before and after it the network learns the rate of change of a cell: the cell, its
! slopes and a constant -> 16 tanh -> 1. The field is saved after every 100 blocks, and a run continues from it.
! Losses are those of one rank, to rounding. A checkpoint of the network is written beside each field.
!
!     make lib bindings
!     mpif90 -O2 build/dtrain.f90 examples/hosts/fortran/burgers_dtrain.f90 -Lbuild -ldtrain -o burgers
!     mkdir run; mpirun -n 2 ./burgers run 400    # up to block 400
!     mpirun -n 3 ./burgers run 600               # from there on other ranks
module meeting
  use dtrain
  use mpi
contains
  ! The all-gather by which the members find each other, over the communicator that user points at.
  integer(c_int) function gather(user, mine, all, bytes) bind(c)
    type(c_ptr), value :: user, mine, all
    integer(c_size_t), value :: bytes
    integer, pointer :: comm, from, to
    call c_f_pointer(user, comm)
    call c_f_pointer(mine, from)
    call c_f_pointer(all, to)
    call MPI_Allgather(from, int(bytes), MPI_BYTE, to, int(bytes), MPI_BYTE, comm, gather)
  end function
end module
program burgers
  use meeting
  use, intrinsic :: iso_fortran_env, only: real64, int64, error_unit
  implicit none
  integer, parameter :: cells = 240, hidden = 16, steps = 4, every = 100
  real(real64), parameter :: nu = 0.005_real64, dx = 1.0_real64 / cells, dt = 0.001_real64
  real(real64), parameter :: rate = 0.0625_real64, momentum = 0.875_real64
  real(real64), dimension(4, hidden), target :: w1, dw1, v1 = 0 ! weights, gradients, velocities
  real(real64), dimension(hidden), target :: w2, dw2, v2 = 0
  real(real64), allocatable :: u(:), before(:), x(:, :), y(:)
  real(real64) :: loss, mean_loss
  integer(int64) :: block, first, last
  integer :: rank, ranks, mine, error, i
  character(256) :: folder, word
  character(300), target :: saved
  character(3), target :: names(4) = ['w1' // c_null_char, 'w2' // c_null_char, 'v1' // c_null_char, 'v2' // c_null_char]
  integer, target :: comm = MPI_COMM_WORLD
  type(c_ptr) :: world, ddp, state, checkpoint
  type(dtrain_param), target :: params(2)
  type(dtrain_state_item), target :: items(2)

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
  call check(dtrain_world_join(dtrain_join_desc(rank=rank, size=ranks, all_gather=c_funloc(gather), user=c_loc(comm), &
                                                abi=dtrain_header_abi()), world))
  params(1) = dtrain_param(c_loc(names(1)), typed_value=c_loc(w1), typed_grad=c_loc(dw1), count=size(w1), dtype=DTRAIN_DTYPE_F64)
  params(2) = dtrain_param(c_loc(names(2)), typed_value=c_loc(w2), typed_grad=c_loc(dw2), count=size(w2), dtype=DTRAIN_DTYPE_F64)
  call check(dtrain_strategy_create(world, params, 2_c_size_t, out=ddp))
  items(1) = dtrain_state_item(c_loc(names(3)), DTRAIN_DTYPE_F64, size(v1), c_loc(v1))
  items(2) = dtrain_state_item(c_loc(names(4)), DTRAIN_DTYPE_F64, size(v2), c_loc(v2))
  call check(dtrain_state_create(world, dtrain_state_desc(strategy=ddp, items=c_loc(items), item_count=2), state))
  write (saved, '(2a, i12.12, a)') trim(folder), '/net/step-', first, c_null_char
  if (first > 0) call check(dtrain_checkpoint_load(state, saved))
  saved = trim(folder) // '/net' // c_null_char
  call check(dtrain_checkpoint_open(world, dtrain_checkpoint_desc(directory=c_loc(saved), state=state), checkpoint))

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
    call check(dtrain_checkpoint_save(checkpoint, block, loss))
    call write_field(block)
  end do
  call check(dtrain_checkpoint_close(checkpoint))
  call dtrain_state_destroy(state)
  call dtrain_strategy_destroy(ddp)
  call check(dtrain_world_leave(world))
  call MPI_Finalize(error)

contains

  subroutine fail(text)
    character(*), intent(in) :: text
    write (error_unit, '(a)') text
    call MPI_Abort(MPI_COMM_WORLD, 1, error)
  end subroutine

  subroutine check(code)
    integer(c_int), intent(in) :: code
    if (code /= DTRAIN_OK) call fail(dtrain_text(dtrain_last_error()))
  end subroutine

  ! One step of the network: the mean square error over the cells, its gradients, SGD with momentum.
  subroutine train()
    real(real64) :: h(hidden, mine), dh(hidden, mine), e(mine)
    h = tanh(matmul(transpose(w1), x))
    e = matmul(w2, h) - y
    loss = sum(e**2) / mine
    e = 2 * e / mine
    dw2 = matmul(h, e)
    call check(dtrain_strategy_ready(ddp, 1_c_size_t)) ! communication begins
    dh = spread(w2, 2, mine) * spread(e, 1, hidden) * (1 - h**2)
    dw1 = matmul(x, transpose(dh))
    call check(dtrain_strategy_ready(ddp, 0_c_size_t))
    call check(dtrain_strategy_finish(ddp)) ! gradients are the mean over the ranks
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
