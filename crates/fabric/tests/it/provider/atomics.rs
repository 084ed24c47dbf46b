//! Atomic operations: in memory that both processes have mapped, by the owner of the memory, and on
//! another host; and what the owner refuses.

use std::ffi::{c_int, c_void};
use std::process::{Child, Command, Stdio};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use memferry_fi::abi::*;
use memferry_message::ShareableBuffer;

use crate::provider::world::*;

const KEY: u64 = 0xa70;
const ALL_ACCESS: u64 = FI_REMOTE_READ | FI_REMOTE_WRITE;
/// The environment variable with the address of the owner, for the process that adds to its memory.
const OWNER: &str = "MEMFERRY_TEST_ATOMIC_OWNER";
/// How often that process adds.
const ADDITIONS: u64 = 500;

/// Registers memory.
pub(crate) fn register(world: &World, at: *mut u8, length: usize, access: u64) -> *mut FidMr {
    let mut mr = null_mut();
    // SAFETY: the domain is open, and `mr` has space for a pointer; the tests keep the memory.
    let code = unsafe {
        let reg = (*(*world.domain).mr).reg;
        reg(world.domain.cast(), at.cast(), length, access, 0, KEY, 0, &raw mut mr, null_mut())
    };
    assert_eq!(code, 0);
    mr
}

/// An operation on 64-bit numbers of peer 0.
#[derive(Clone, Copy)]
struct Op<'a> {
    op: c_int,
    address: u64,
    key: u64,
    operands: &'a [u64],
    compare: &'a [u64],
}

impl Default for Op<'_> {
    fn default() -> Self {
        Self { op: FI_SUM, address: 0, key: KEY, operands: &[1], compare: &[] }
    }
}

impl Side {
    fn atomics(&self) -> &OpsAtomic {
        // SAFETY: the endpoint is open.
        unsafe { &*(*self.ep).atomic }
    }

    /// Starts an operation: one that compares, fetches, or returns nothing.
    fn atomic(&self, op: Op<'_>, results: Option<&mut [u64]>) -> c_int {
        let Op { op, address, key, operands, compare } = op;
        let (values, count) = (operands.as_ptr().cast::<c_void>(), operands.len());
        let result = results.map_or(null_mut(), <[u64]>::as_mut_ptr).cast::<c_void>();
        let (none, number) = (null_mut(), context(9));
        let (ops, datatype) = (self.atomics(), FI_UINT64);
        // SAFETY: the endpoint is open; the test keeps the memory.
        let code = unsafe {
            if !compare.is_empty() {
                let compare = compare.as_ptr().cast();
                (ops.compwrite)(
                    self.ep, values, count, none, compare, none, result, none, 0, address, key,
                    datatype, op, number,
                )
            } else if !result.is_null() {
                (ops.readwrite)(
                    self.ep, values, count, none, result, none, 0, address, key, datatype, op,
                    number,
                )
            } else {
                (ops.write)(self.ep, values, count, none, 0, address, key, datatype, op, number)
            }
        };
        code as c_int
    }

    /// Starts an operation, and retries while the peer is not connected.
    fn start_atomic(&self, op: Op<'_>, mut results: Option<&mut [u64]>) -> c_int {
        let end = Instant::now() + Duration::from_secs(200);
        loop {
            let code = self.atomic(op, results.as_deref_mut());
            if code != -FI_EAGAIN {
                return code;
            }
            assert!(Instant::now() < end, "it is never accepted");
            move_all_on();
        }
    }

    /// Executes an operation that must succeed.
    fn run_atomic(&self, op: Op<'_>, results: Option<&mut [u64]>) {
        let direction = if results.is_some() { FI_READ } else { FI_WRITE };
        assert_eq!(self.start_atomic(op, results), 0);
        let entry = self.read();
        assert_eq!((entry.op_context, entry.flags), (context(9), FI_ATOMIC | direction));
    }

    /// Reads an entry without progress of any other endpoint.
    fn read_alone(&self) -> Option<CqTaggedEntry> {
        let mut entry = std::mem::MaybeUninit::<CqTaggedEntry>::uninit();
        // SAFETY: the queue is open, and there is space for an entry, which is written if the
        // count is one.
        unsafe {
            let count = ((*(*self.queue).ops).read)(self.queue, entry.as_mut_ptr().cast(), 1);
            (count == 1).then(|| entry.assume_init())
        }
    }
}

/// Runs operations of each class on the first two numbers of a peer's memory.
fn check_operations(one: &Side, memory: &[AtomicU64]) {
    let values = || [memory[0].load(Ordering::Relaxed), memory[1].load(Ordering::Relaxed)];
    memory[0].store(10, Ordering::Relaxed);
    memory[1].store(20, Ordering::Relaxed);
    let mut results = [0; 2];
    let add = Op { operands: &[5, 7], ..Op::default() };
    one.run_atomic(add, Some(&mut results));
    assert_eq!((results, values()), ([10, 20], [15, 27]));
    one.run_atomic(Op { op: FI_MIN, ..add }, None);
    assert_eq!(values(), [5, 7]);
    let swap = Op { op: FI_CSWAP, operands: &[1, 2], compare: &[5, 8], ..Op::default() };
    one.run_atomic(swap, Some(&mut results));
    assert_eq!((results, values()), ([5, 7], [1, 7]));
    one.run_atomic(Op { op: FI_ATOMIC_WRITE, operands: &[3], address: 8, ..add }, None);
    one.run_atomic(Op { op: FI_ATOMIC_READ, ..add }, Some(&mut results));
    assert_eq!((results, values()), ([1, 3], [1, 3]));
}

fn numbers(count: usize) -> Vec<AtomicU64> {
    (0..count).map(|_| AtomicU64::new(0)).collect()
}

#[test]
fn the_owner_executes_operations_on_its_memory() {
    let world = World::new();
    let (one, _two) = world.pair();
    let memory = numbers(64);
    let mr = register(&world, memory.as_ptr().cast_mut().cast(), 512, ALL_ACCESS);
    check_operations(&one, &memory);
    // Many at a time, with one segment more than a cell of a ring holds.
    for round in 0..400 {
        let code = one.start_atomic(Op { operands: &[1; 64], ..Op::default() }, None);
        assert_eq!(code, 0, "round {round}");
    }
    (0..400).for_each(|_| assert_eq!(one.read().flags, FI_ATOMIC | FI_WRITE));
    assert!(memory[2..].iter().all(|number| number.load(Ordering::Relaxed) == 400));
    assert_eq!(close(mr.cast()), 0);
}

#[test]
fn operations_on_shared_memory_need_no_call_of_its_owner() {
    let world = World::new();
    let (one, _two) = world.pair();
    let mut buffer = ShareableBuffer::new(4096).unwrap();
    let at = buffer.as_mut_ptr();
    let mr = register(&world, at, 4096, ALL_ACCESS);
    // SAFETY: the buffer has these numbers, aligned, and is only accessed by atomics meanwhile.
    let memory = unsafe { std::slice::from_raw_parts(at.cast::<AtomicU64>(), 8) };
    check_operations(&one, memory);
    // The region is mapped by now, or soon.
    let end = Instant::now() + Duration::from_secs(200);
    loop {
        assert_eq!(one.start_atomic(Op::default(), None), 0);
        if one.read_alone().is_some() {
            break;
        }
        one.read();
        assert!(Instant::now() < end, "it is executed by the owner every time");
    }
    check_operations(&one, memory);
    assert_eq!(close(mr.cast()), 0);
}

#[test]
fn what_the_owner_does_not_permit_is_refused() {
    let world = World::new();
    let (one, _two) = world.pair();
    let memory = numbers(8);
    let at: *mut u8 = memory.as_ptr().cast_mut().cast();
    let mr = register(&world, at, 64, FI_REMOTE_READ);
    let mut result = [0];
    let denied = |code: c_int, wanted: c_int| {
        // Known at once, or when the owner replies.
        let code = if code == 0 { one.read_error().err } else { -code };
        assert_eq!(code, wanted);
    };
    one.run_atomic(Op { op: FI_ATOMIC_READ, ..Op::default() }, Some(&mut result));
    denied(one.start_atomic(Op::default(), None), FI_EACCES);
    denied(one.start_atomic(Op::default(), Some(&mut result)), FI_EACCES);
    denied(one.start_atomic(Op { key: 77, ..Op::default() }, None), FI_ENOKEY);
    assert_eq!(close(mr.cast()), 0);
    let mr = register(&world, at, 64, ALL_ACCESS);
    denied(one.start_atomic(Op { address: 64, ..Op::default() }, None), FI_EINVAL);
    denied(one.start_atomic(Op { address: u64::MAX - 3, ..Op::default() }, None), FI_EINVAL);
    denied(one.start_atomic(Op { address: 4, ..Op::default() }, None), FI_EINVAL);
    denied(one.start_atomic(Op { operands: &[1; 9], ..Op::default() }, None), FI_EINVAL);
    assert!(memory.iter().all(|number| number.load(Ordering::Relaxed) == 0));
    // What is not offered is refused before anything is sent.
    let long = vec![1; 513];
    assert_eq!(one.atomic(Op { operands: &long, ..Op::default() }, None), -FI_EMSGSIZE);
    assert_eq!(one.atomic(Op { operands: &[], ..Op::default() }, None), -FI_EINVAL);
    assert_eq!(one.atomic(Op { op: FI_CSWAP, ..Op::default() }, None), -FI_EOPNOTSUPP);
    assert_eq!(one.atomic(Op { op: FI_ATOMIC_READ, ..Op::default() }, None), -FI_EOPNOTSUPP);
    one.run_atomic(Op { address: 56, ..Op::default() }, None);
    assert_eq!(memory[7].load(Ordering::Relaxed), 1);
    assert_eq!(close(mr.cast()), 0);
}

#[test]
fn what_is_offered_can_be_asked_for() {
    let world = World::new();
    let side = world.side();
    let (ops, mut count) = (side.atomics(), 0);
    // SAFETY: the endpoint and the domain are open, and there is space for the results.
    unsafe {
        assert_eq!((ops.writevalid)(side.ep, FI_DOUBLE, FI_SUM, &raw mut count), 0);
        assert_eq!(count, 512);
        assert_eq!((ops.readwritevalid)(side.ep, FI_INT8, FI_ATOMIC_READ, &raw mut count), 0);
        assert_eq!((ops.compwritevalid)(side.ep, FI_FLOAT, FI_CSWAP_LE, &raw mut count), 0);
        let refused = (ops.writevalid)(side.ep, FI_LONG_DOUBLE, FI_SUM, &raw mut count);
        assert_eq!(refused, -FI_EOPNOTSUPP);
        let refused = (ops.compwritevalid)(side.ep, FI_INT32, FI_SUM, &raw mut count);
        assert_eq!(refused, -FI_EOPNOTSUPP);
        let mut attr = AtomicAttr { count: 0, size: 0 };
        let query = (*(*world.domain).ops).query_atomic;
        assert_eq!(query(world.domain, FI_UINT16, FI_BOR, &raw mut attr, FI_FETCH_ATOMIC), 0);
        assert_eq!((attr.count, attr.size), (2048, 2));
        assert_eq!(query(world.domain, FI_UINT16, FI_BOR, &raw mut attr, FI_TAGGED), -FI_EINVAL);
    }
}

#[test]
fn an_operation_fails_if_the_owner_is_gone() {
    let world = World::new();
    let (one, two) = world.pair();
    let memory = numbers(8);
    let mr = register(&world, memory.as_ptr().cast_mut().cast(), 64, ALL_ACCESS);
    one.run_atomic(Op::default(), None);
    let mut result = [0];
    assert_eq!(one.start_atomic(Op::default(), Some(&mut result)), 0);
    drop(two);
    let error = one.read_error();
    assert_eq!((error.err, error.op_context), (FI_ECONNRESET, context(9)));
    assert_ne!(one.start_atomic(Op::default(), None), 0);
    assert_eq!(close(mr.cast()), 0);
}

#[test]
fn with_automatic_progress_the_owner_calls_nothing() {
    let hints = Offer::nothing().with(|parts| parts.domain.data_progress = FI_PROGRESS_AUTO);
    let world = World::of(Offer::for_hints(Some(&hints)).unwrap());
    let (one, _two) = world.pair();
    let memory = numbers(8);
    let mr = register(&world, memory.as_ptr().cast_mut().cast(), 64, ALL_ACCESS);
    one.run_atomic(Op::default(), None);
    for _ in 0..100 {
        let mut result = [0];
        assert_eq!(one.atomic(Op::default(), Some(&mut result)), 0);
        let end = Instant::now() + Duration::from_secs(200);
        while one.read_alone().is_none() {
            assert!(Instant::now() < end, "nobody executes it");
            std::thread::yield_now();
        }
    }
    assert_eq!(memory[0].load(Ordering::Relaxed), 101);
    assert_eq!(close(mr.cast()), 0);
}

/// The process that adds to the memory of another; it is not a test of its own.
#[test]
fn adder() {
    let Ok(owner) = std::env::var(OWNER) else { return };
    load_libfabric();
    let world = World::new();
    let side = world.side();
    let mut name = [0; 64];
    for (index, byte) in name.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&owner[2 * index..2 * index + 2], 16).unwrap();
    }
    assert_eq!(side.insert(&name), 0);
    let mut last = None;
    for _ in 0..ADDITIONS {
        let mut before = [0];
        side.run_atomic(Op::default(), Some(&mut before));
        assert!(last.is_none_or(|last| before[0] > last), "it grows");
        last = Some(before[0]);
    }
    // The last word: a write with data, behind all additions.
    let bytes = [7u8; 8];
    let write = || {
        // SAFETY: the endpoint is open, and the memory is kept.
        unsafe {
            let (at, none) = (bytes.as_ptr().cast(), null_mut());
            ((*(*side.ep).rma).writedata)(side.ep, at, 8, none, 99, 0, 8, KEY, context(3))
        }
    };
    while write() == -(FI_EAGAIN as isize) {
        move_all_on();
    }
    assert_eq!(side.read().op_context, context(3));
    // The owner ends this process when all processes have added, which a busy machine delays.
    let mut buffer = [0; 1];
    assert_eq!(side.trecv(&mut buffer, 5, 0, 4), 0);
    let end = Instant::now() + Duration::from_secs(600);
    while side.try_read().err() == Some(-FI_EAGAIN) && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Makes the libfabric of this machine the one that the provider finds.
fn load_libfabric() -> bool {
    // SAFETY: the name is a C string; libfabric's constructors have no preconditions.
    let library = unsafe { libc::dlopen(c"libfabric.so.1".as_ptr(), libc::RTLD_LAZY) };
    !library.is_null()
}

fn start_adder(owner: &Side, host: Option<&str>) -> Child {
    let name: String = owner.name().iter().map(|byte| format!("{byte:02x}")).collect();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "provider::atomics::adder", "--nocapture"]).env(OWNER, name);
    if let Some(host) = host {
        command.env("MEMFERRY_HOST_ID", host);
    }
    command.stdout(Stdio::null()).spawn().unwrap()
}

/// Waits for the next entry, for as long as a number grows: on a busy machine the last addition comes late.
fn read_while_growing(side: &Side, number: &AtomicU64) -> CqTaggedEntry {
    let (mut last, mut changed) = (0, Instant::now());
    loop {
        match side.try_read() {
            Ok((entry, _)) => return entry,
            Err(code) => assert_eq!(code, -FI_EAGAIN, "an entry is expected"),
        }
        let now = number.load(Ordering::Relaxed);
        if now != last {
            (last, changed) = (now, Instant::now());
        }
        assert!(changed.elapsed() < TIMEOUT, "no addition comes after {now}");
        std::thread::yield_now();
    }
}

/// Serves processes that add, on this host and on another, and checks that no addition is lost.
fn serve_adders(hosts: &[Option<&str>]) {
    let world = World::new();
    let side = world.side();
    let memory = numbers(8);
    let mr = register(&world, memory.as_ptr().cast_mut().cast(), 64, ALL_ACCESS);
    let mut adders: Vec<_> = hosts.iter().map(|host| start_adder(&side, *host)).collect();
    for _ in hosts {
        let entry = read_while_growing(&side, &memory[0]);
        assert_eq!(entry.flags, FI_RMA | FI_REMOTE_WRITE | FI_REMOTE_CQ_DATA);
        assert_eq!((entry.data, entry.len), (99, 8));
        assert_eq!(memory[1].load(Ordering::Relaxed), 0x0707_0707_0707_0707);
    }
    assert_eq!(memory[0].load(Ordering::Relaxed), hosts.len() as u64 * ADDITIONS);
    for adder in &mut adders {
        // They wait for a word that never comes, and are done.
        assert_eq!(adder.try_wait().unwrap(), None, "it failed");
        adder.kill().unwrap();
        adder.wait().unwrap();
    }
    assert_eq!(close(mr.cast()), 0);
}

#[test]
fn several_processes_add_and_lose_nothing() {
    if World::new().offer.see(|parts| parts.info.caps & FI_RMA == 0) {
        return;
    }
    serve_adders(&[None, None]);
}

/// The process that owns memory which processes of another host add to; it is not a test of its own.
#[test]
fn distant_owner() {
    if std::env::var_os("MEMFERRY_TEST_DISTANT_OWNER").is_some() {
        assert!(load_libfabric());
        serve_adders(&[None, Some("memferry-test-elsewhere"), Some("memferry-test-far-away")]);
    }
}

#[test]
fn processes_of_other_hosts_add_too() {
    if !load_libfabric() {
        let why = "the library is not installed: apt install libfabric1";
        return memferry_testing::skip(memferry_testing::Requirement::Libfabric, why);
    }
    // In a process of its own: the other tests have no libfabric.
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "provider::atomics::distant_owner", "--nocapture"]);
    command.env("MEMFERRY_TEST_DISTANT_OWNER", "1").env("MEMFERRY_FABRIC_INTERFACE", "127.0.0.1");
    let ran = command.output().unwrap();
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
}
