//! The C calls, in any order, with valid and invalid arguments: numbers that were never issued,
//! foreign descriptors, null pointers, lengths that run past the end of memory. Unmapped memory is
//! never passed: that is a fault, as in memcpy.
//!
//! No call may return an internal error, block its caller when the library is closed, or access
//! memory outside its arguments.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_int, c_void};
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use adma::*;

use crate::script::Script;
use memferry_testing::message::unique;

const ARENA: usize = 256 << 10;
const GUARD: usize = 4096;
const GUARD_BYTE: u8 = 0xA5;
/// A call that takes longer waits for something that never happens: the library is closed
/// meanwhile.
const CALL_TIMEOUT: Duration = Duration::from_millis(30);

/// The memory that the calls work on, and the numbers that they returned.
struct CallState {
    /// Memory between guards, which lives as long as the process. No slice of it exists while the
    /// library may use it.
    arena: *mut u8,
    /// Descriptors that are not the library's.
    foreign: Vec<OwnedFd>,
    descriptors: Vec<c_int>,
    cookies: Vec<i64>,
    windows: Vec<i64>,
    handles: Vec<AdmaWindow>,
    /// Memory is in use by copies or messages.
    is_busy: bool,
}

thread_local! {
    static WORLD: RefCell<Option<CallState>> = const { RefCell::new(None) };
}

pub(crate) fn run(bytes: &[u8]) {
    WORLD.with_borrow_mut(|world| {
        let world = world.get_or_insert_with(CallState::new);
        let mut script = Script::new(bytes);
        while !script.is_empty() {
            world.make_call(&mut script);
        }
        world.end();
    });
}

/// The result of a call; fails if it is an internal error of the library.
fn checked(code: impl Into<i64>) -> i64 {
    let code = code.into();
    if code < 0 {
        // SAFETY: both return strings that live until the next failed call.
        let (meaning, text) = unsafe {
            (CStr::from_ptr(adma_strerror(code as c_int)), CStr::from_ptr(adma_last_error()))
        };
        assert!(code != i64::from(ADMA_ENOTRECOVERABLE), "{text:?}");
        assert!(!meaning.is_empty() && !text.is_empty(), "nothing is said about {code}");
        assert!(code >= -200, "{code} is no code");
    }
    code
}

/// The start of the running call, if it may block.
static BLOCKED_SINCE: Mutex<Option<Instant>> = Mutex::new(None);
static CALL_STARTED: Condvar = Condvar::new();

fn blocked_since() -> MutexGuard<'static, Option<Instant>> {
    BLOCKED_SINCE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes a call that may block for ever, and closes the library if it does.
fn blocking(call: impl FnOnce() -> i64) -> i64 {
    *blocked_since() = Some(Instant::now());
    CALL_STARTED.notify_one();
    let code = call();
    // The thread that closes the library holds the lock until then.
    *blocked_since() = None;
    checked(code)
}

/// Closes the library whenever a call blocks too long.
fn watchdog() {
    let mut since = blocked_since();
    loop {
        since = match *since {
            None => CALL_STARTED.wait(since).unwrap_or_else(PoisonError::into_inner),
            Some(began) if began.elapsed() > CALL_TIMEOUT => {
                adma_fini();
                drop(since);
                std::thread::sleep(Duration::from_millis(1));
                blocked_since()
            }
            Some(_) => {
                drop(since);
                std::thread::sleep(Duration::from_millis(5));
                blocked_since()
            }
        };
    }
}

impl CallState {
    fn new() -> Self {
        std::thread::spawn(watchdog);
        let mut arena = vec![0; ARENA + 2 * GUARD];
        arena[..GUARD].fill(GUARD_BYTE);
        arena[GUARD + ARENA..].fill(GUARD_BYTE);
        let foreign =
            (0..4).map(|_| File::open("/dev/null").expect("it is there").into()).collect();
        let (descriptors, cookies, windows) = (Vec::new(), Vec::new(), Vec::new());
        let arena = Vec::leak(arena).as_mut_ptr();
        Self { arena, foreign, descriptors, cookies, windows, handles: Vec::new(), is_busy: false }
    }

    /// Some memory, or none, or more than the address space has.
    fn memory(&self, script: &mut Script<'_>) -> (*mut c_void, usize) {
        let at = script.below(ARENA);
        let length = script.pick(&[0, 1, 8, 100, 5000, 70_000, ARENA]).min(ARENA - at);
        let start = self.arena.wrapping_add(GUARD + at).cast::<c_void>();
        match script.byte() % 16 {
            0 => (std::ptr::null_mut(), length),
            1 => (start, usize::MAX - at),
            2 => (std::ptr::null_mut(), usize::MAX),
            _ => (start, length),
        }
    }

    /// A variable, often of 8 bytes and aligned.
    fn variable(&self, script: &mut Script<'_>) -> *mut u64 {
        let at = script.below(ARENA / 8 - 1) * 8;
        let start = self.arena.wrapping_add(GUARD);
        let aligned = start.wrapping_add(start.align_offset(8) + at);
        match script.byte() % 8 {
            0 => std::ptr::null_mut(),
            1 => aligned.wrapping_sub(3).cast(),
            _ => aligned.cast(),
        }
    }

    fn descriptor(&self, script: &mut Script<'_>) -> c_int {
        match script.byte() % 8 {
            0 => script.u32().cast_signed(),
            1 if script.flag() => self.foreign[script.below(self.foreign.len())].as_raw_fd(),
            1 => c_int::from(script.byte() % 32) - 2,
            _ if self.descriptors.is_empty() => -1,
            _ => self.descriptors[script.below(self.descriptors.len())],
        }
    }

    fn cookie(&self, script: &mut Script<'_>) -> i64 {
        match script.byte() % 8 {
            0 => script.u64().cast_signed(),
            1 => script.number().cast_signed(),
            _ if self.cookies.is_empty() => 0,
            2 => self.cookies[script.below(self.cookies.len())].wrapping_add(script.byte().into()),
            _ => self.cookies[script.below(self.cookies.len())],
        }
    }

    fn window(&self, script: &mut Script<'_>) -> i64 {
        match script.byte() % 8 {
            0 => script.u64().cast_signed(),
            1 => self.cookie(script),
            _ if self.windows.is_empty() => 0,
            2 => self.windows[script.below(self.windows.len())].wrapping_add(script.byte().into()),
            _ => self.windows[script.below(self.windows.len())],
        }
    }

    fn keep_cookie(&mut self, cookie: i64) {
        if checked(cookie) >= 0 {
            self.is_busy = true;
            self.cookies.push(cookie);
        }
    }

    fn make_call(&mut self, script: &mut Script<'_>) {
        match script.byte() % 5 {
            0 => self.copy_something(script),
            1 => self.query(script),
            2 => self.use_link(script),
            3 => self.use_window(script),
            _ => self.manage(script),
        }
    }

    fn copy_something(&mut self, script: &mut Script<'_>) {
        let ((from, from_bytes), (to, to_bytes)) = (self.memory(script), self.memory(script));
        // A length beyond the address space applies to both.
        let is_too_long = from_bytes.max(to_bytes) > ARENA;
        let bytes = if is_too_long { usize::MAX } else { from_bytes.min(to_bytes) };
        let (variable, value) = (self.variable(script), script.number());
        // SAFETY: a range that is not null is inside the arena, or runs past the end of memory,
        // which is refused.
        unsafe {
            match script.byte() % 10 {
                8 => {
                    let mut crc = 0;
                    checked(adma_crc(from, bytes, &raw mut crc));
                    checked(adma_copy_crc(from, to, bytes, &raw mut crc));
                }
                9 => {
                    let (second, second_bytes) = self.memory(script);
                    let is_too_long = is_too_long || second_bytes > ARENA;
                    let bytes = if is_too_long { usize::MAX } else { bytes.min(second_bytes) };
                    if script.flag() {
                        checked(adma_dualcast(from, to, second, bytes));
                    } else {
                        self.keep_cookie(adma_idualcast(from, to, second, bytes));
                    }
                }
                0 => self.copy_and_check(from, to, bytes),
                1 => self.keep_cookie(adma_icopy(from, to, bytes)),
                2 => self.keep_cookie(adma_icopy_notify(from, to, bytes, variable, value)),
                3 => self.fill_and_check(to, value as c_int, bytes),
                4 => {
                    let mut first = usize::MAX;
                    let place = if script.flag() { &raw mut first } else { std::ptr::null_mut() };
                    let found = checked(adma_compare(from, to, bytes, place));
                    assert!(found <= 1 && (found != 1 || place.is_null() || first < bytes));
                }
                5 | 6 => {
                    let (extra, extra_bytes) = self.memory(script);
                    let piece =
                        |addr: *mut c_void, len: usize| AdmaPiece { addr, len: len.min(1000) };
                    let pieces = [piece(from, bytes), piece(extra, extra_bytes)];
                    let count = script.pick(&[0, 1, 2, 2]);
                    let start =
                        if script.is_one_in(8) { std::ptr::null() } else { pieces.as_ptr() };
                    let room = self.arena.wrapping_add(GUARD).cast();
                    let to = if (2000..=ARENA).contains(&to_bytes) { to } else { room };
                    self.keep_cookie(if script.flag() {
                        adma_ideliver(start, count, to)
                    } else {
                        adma_ideliver_notify(start, count, to, variable, value)
                    });
                }
                _ => {
                    let time = script.pick(&[0, 1, 1000, 1_000_000]);
                    checked(adma_wait_notify(variable, value, time));
                }
            }
        }
    }

    /// # Safety
    /// As `adma_copy`, or the length is too long for any memory.
    unsafe fn copy_and_check(&self, from: *mut c_void, to: *mut c_void, bytes: usize) {
        let is_real = !from.is_null() && !to.is_null() && bytes <= ARENA && !self.is_busy;
        let slice = |at: *mut c_void| {
            // SAFETY: inside the arena, and no other thread uses it.
            unsafe { std::slice::from_raw_parts(at.cast::<u8>().cast_const(), bytes) }.to_vec()
        };
        let before = is_real.then(|| slice(from));
        // SAFETY: passed on.
        let code = checked(unsafe { adma_copy(from, to, bytes) });
        assert!(code != 0 || bytes <= ARENA, "{bytes} bytes were taken for memory");
        if let (Some(before), 0) = (before, code) {
            assert!(slice(to) == before, "{bytes} bytes were not copied");
        }
    }

    /// # Safety
    /// As `adma_fill`, or the length is too long for any memory.
    unsafe fn fill_and_check(&self, to: *mut c_void, value: c_int, bytes: usize) {
        // SAFETY: passed on.
        let code = checked(unsafe { adma_fill(to, value, bytes) });
        assert!(code != 0 || bytes <= ARENA, "{bytes} bytes were taken for memory");
        if code == 0 && bytes > 0 && !self.is_busy {
            // SAFETY: inside the arena: the call has accepted it.
            let filled = unsafe { std::slice::from_raw_parts(to.cast::<u8>().cast_const(), bytes) };
            assert!(filled.iter().all(|byte| *byte == value as u8));
        }
    }

    fn query(&mut self, script: &mut Script<'_>) {
        let cookie = self.cookie(script);
        let (mut message, mut buffer) = (0u64, 0u64);
        match script.byte() % 6 {
            0 => assert!(checked(adma_check_copy(cookie)) <= 1),
            1 => assert!(blocking(|| adma_wait_copy(cookie).into()) <= 0),
            2 => assert!(checked(adma_check(cookie)) <= 1),
            3 => assert!(blocking(|| adma_wait(cookie).into()) <= 0),
            4 => drop(checked(adma_result(cookie))),
            _ => {
                let place = if script.flag() { &raw mut message } else { std::ptr::null_mut() };
                // SAFETY: null or valid.
                checked(unsafe { adma_lengths(cookie, place, &raw mut buffer) });
            }
        }
    }

    fn use_link(&mut self, script: &mut Script<'_>) {
        let (fd, (at, bytes)) = (self.descriptor(script), self.memory(script));
        // SAFETY: a range that is not null is inside the arena, which stays valid, or is refused.
        unsafe {
            match script.byte() % 8 {
                0 | 1 => self.keep_cookie(adma_iread(fd, at, bytes)),
                2 | 3 => self.keep_cookie(adma_iwrite(fd, at, bytes)),
                4 => drop(blocking(|| adma_read(fd, at, bytes))),
                5 => drop(blocking(|| adma_write(fd, at, bytes).into())),
                6 => drop(checked(adma_peek(fd))),
                _ => self.make_pair(),
            }
        }
        self.is_busy = true;
    }

    fn use_window(&mut self, script: &mut Script<'_>) {
        let (fd, window) = (self.descriptor(script), self.window(script));
        let (at, bytes) = self.memory(script);
        let (offset, value) = (script.number(), script.number());
        let notify = script.number();
        self.is_busy = true;
        // SAFETY: as for links; a window's memory is the arena, which stays valid.
        unsafe {
            match script.byte() % 12 {
                0 => {
                    let mut handle = AdmaWindow { bytes: [0; 16] };
                    let place =
                        if script.is_one_in(8) { std::ptr::null_mut() } else { &raw mut handle };
                    let rights = c_int::from(script.byte() % 5);
                    let number = checked(adma_expose(fd, at, bytes, rights, place));
                    if number >= 0 {
                        self.windows.push(number);
                        self.handles.push(handle);
                    }
                }
                1 => drop(checked(adma_withdraw(window))),
                2 => {
                    let mut found = 0;
                    let place = if script.flag() { &raw mut found } else { std::ptr::null_mut() };
                    let time = script.pick(&[0, 1000, 1_000_000]);
                    checked(adma_wait_value(window, offset, value, time, place));
                }
                3 | 4 => {
                    let handle = self.handle(script);
                    let number = checked(adma_attach(fd, &raw const handle));
                    self.windows.extend((number >= 0).then_some(number));
                }
                5 => drop(checked(adma_detach(window))),
                6 => drop(checked(adma_window_length(window))),
                7 => drop(blocking(|| adma_put(window, offset, at, bytes).into())),
                8 => drop(blocking(|| {
                    adma_put_notify(window, offset, at, bytes, notify, value).into()
                })),
                9 => drop(blocking(|| adma_get(window, offset, at, bytes).into())),
                10 => self.keep_cookie(match script.byte() % 3 {
                    0 => adma_iput(window, offset, at, bytes),
                    1 => adma_iput_notify(window, offset, at, bytes, notify, value),
                    _ => adma_iget(window, offset, at, bytes),
                }),
                _ => drop(blocking(|| adma_fence(window).into())),
            }
        }
    }

    fn handle(&self, script: &mut Script<'_>) -> AdmaWindow {
        if !script.is_one_in(4) && !self.handles.is_empty() {
            return AdmaWindow { ..self.handles[script.below(self.handles.len())] };
        }
        let mut bytes = [0; 16];
        let given = script.bytes(16);
        bytes[..given.len()].copy_from_slice(given);
        AdmaWindow { bytes }
    }

    fn manage(&mut self, script: &mut Script<'_>) {
        match script.byte() % 10 {
            0 => drop(checked(adma_init())),
            1 => self.end(),
            2 => drop(checked(adma_close(self.descriptor(script)))),
            3 => {
                let fd = self.descriptor(script);
                let code = blocking(|| adma_accept(fd).into());
                self.descriptors.extend((code >= 0).then_some(code as c_int));
            }
            4 => {
                let name = self.name(script);
                // SAFETY: null or a string.
                let code = checked(unsafe {
                    adma_listen(name.as_ref().map_or(std::ptr::null(), |n| n.as_ptr()))
                });
                self.descriptors.extend((code >= 0).then_some(code as c_int));
            }
            5 => {
                let name = self.name(script);
                // SAFETY: null or a string.
                let connect = || unsafe {
                    adma_connect(name.as_ref().map_or(std::ptr::null(), |n| n.as_ptr()))
                };
                let code = blocking(|| connect().into());
                self.descriptors.extend((code >= 0).then_some(code as c_int));
            }
            6 => {
                let (at, bytes) = self.memory(script);
                // SAFETY: inside the arena, which stays valid, or refused.
                checked(unsafe { adma_register(at, bytes) });
                checked(adma_unregister(at));
            }
            7 => {
                let mut place = std::ptr::null_mut();
                // SAFETY: the pointer is valid; memory that is not of a GPU is refused.
                unsafe {
                    checked(adma_device_alloc(script.number() as usize, &raw mut place));
                    checked(adma_device_free(script.number() as usize as *mut c_void));
                    checked(adma_device_free(place));
                }
            }
            8 => drop(checked(adma_use_gpu(script.u32().cast_signed() | 1 << 20))),
            _ => self.make_pair(),
        }
    }

    /// A unique name, or an invalid one.
    fn name(&self, script: &mut Script<'_>) -> Option<CString> {
        let own = unique("memferry-fuzz");
        let length = script.byte().into();
        let text: Vec<u8> = match script.byte() % 4 {
            0 => return None,
            1 => Vec::new(),
            // Not a path: it could be that of a file.
            2 => script
                .bytes(length)
                .iter()
                .copied()
                .filter(|byte| ![0, b'/'].contains(byte))
                .collect(),
            _ => own.into_bytes(),
        };
        CString::new(text).ok()
    }

    /// Both sides of a link, in this process.
    fn make_pair(&mut self) {
        let name = CString::new(unique("memferry-fuzz")).expect("no zero in it");
        // SAFETY: a string.
        let listener = checked(unsafe { adma_listen(name.as_ptr()) }) as c_int;
        if listener < 0 {
            return;
        }
        let connecting = std::thread::spawn(move || {
            // SAFETY: a string.
            unsafe { adma_connect(name.as_ptr()) }
        });
        let here = blocking(|| adma_accept(listener).into());
        let there = connecting.join().expect("it connects, or not");
        self.descriptors.extend([here as c_int, there].into_iter().filter(|fd| *fd >= 0));
        checked(adma_close(listener));
    }

    /// Closes the library, which does not access the arena from then on.
    fn end(&mut self) {
        assert_eq!(checked(adma_fini()), 0);
        for descriptor in self.foreign.iter().map(AsRawFd::as_raw_fd).chain(0..3) {
            // SAFETY: only reads.
            let is_open = unsafe { libc::fcntl(descriptor, libc::F_GETFD) } >= 0;
            assert!(is_open, "descriptor {descriptor} was closed, which is not the library's");
        }
        // SAFETY: the arena has this length, and the library is closed.
        let arena = unsafe { std::slice::from_raw_parts(self.arena, ARENA + 2 * GUARD) };
        let (before, behind) = (&arena[..GUARD], &arena[GUARD + ARENA..]);
        let is_whole = before.iter().chain(behind).all(|byte| *byte == GUARD_BYTE);
        assert!(is_whole, "bytes beside the arena were written");
        self.descriptors.clear();
        self.cookies.clear();
        self.windows.clear();
        self.handles.clear();
        self.is_busy = false;
    }
}
