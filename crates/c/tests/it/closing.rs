//! Closing the library from several threads.

use std::ffi::{CString, c_int};
use std::thread;

use adma::{ADMA_EBADF, adma_accept, adma_connect, adma_fini, adma_listen, adma_peek};
use memferry_testing::in_own_process;

/// Both ends of so many links.
fn links(count: usize) -> Vec<c_int> {
    let name = CString::new(format!("adma-closing-{}", std::process::id())).unwrap();
    // SAFETY: a text.
    let listener = unsafe { adma_listen(name.as_ptr()) };
    let connecting = thread::spawn(move || {
        // SAFETY: a text.
        (0..count).map(|_| unsafe { adma_connect(name.as_ptr()) }).collect::<Vec<_>>()
    });
    let mut links: Vec<_> = (0..count).map(|_| adma_accept(listener)).collect();
    links.extend(connecting.join().unwrap());
    assert!(links.iter().all(|descriptor| *descriptor >= 0));
    links
}

#[test]
fn whoever_closes_the_library_second_returns_when_all_is_closed_too() {
    if !in_own_process() {
        return;
    }
    let links = links(30);
    let first = thread::spawn(|| adma_fini());
    // The first has taken them all, and is about to close them one by one.
    while adma_peek(links[0]) != i64::from(ADMA_EBADF) {}
    assert_eq!(adma_fini(), 0);
    for descriptor in links {
        // SAFETY: looks only.
        let is_open = unsafe { libc::fcntl(descriptor, libc::F_GETFD) } >= 0;
        assert!(!is_open, "descriptor {descriptor} is still open");
    }
    assert_eq!(first.join().unwrap(), 0);
}
