//! Two processes and a window: one exposes memory, the other puts to it and gets from it, and a
//! notification wakes the owner when the data has arrived.
//!
//! `cargo run --release --example window` starts both.

#![allow(clippy::print_stdout, reason = "an example shows something")]

use std::process::Command;

use memferry::message::{
    Error, Link, Listener, PutNotification, Rights, ShareableBuffer, Window, WindowHandle,
};

/// The layout of the window: a notification variable, then the data.
const VARIABLE: usize = 0;
const DATA: usize = 64;
const DATA_BYTES: usize = 16 << 20;
const ROUNDS: u64 = 5;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // The second process runs this program again, with the name to connect to.
    match std::env::args().nth(1) {
        Some(name) => put_everything(&name),
        None => own_the_memory(),
    }
}

fn own_the_memory() -> Result<(), Box<dyn std::error::Error>> {
    let name = format!("memferry-example-window-{}", std::process::id());
    let listener = Listener::bind(&name)?;
    let mut child = Command::new(std::env::current_exe()?).arg(&name).spawn()?;
    let link = listener.accept()?;

    // Any buffer works. The peer maps a `ShareableBuffer`, and then needs no system call.
    let buffer = ShareableBuffer::new(DATA + DATA_BYTES)?;
    let window: Window<_> = link.expose(buffer, Rights::READ_WRITE)?;
    link.write(&window.handle().to_bytes())?;

    for round in 1..=ROUNDS {
        // ... the owner computes here while the peer puts ...
        let found = window.wait(VARIABLE, None, |value| value >= round)?;
        // A thread that observes the value also observes the data.
        let mut first = [0];
        window.read(DATA, &mut first);
        println!("the variable is {found:?}, the first byte {}", first[0]);
        link.write(&[])?;
    }

    // The peer has finished its last access.
    link.read(&mut [])?;
    // From here on, no other process accesses the memory.
    let buffer = window.withdraw()?;
    assert!(buffer[DATA..].iter().all(|&byte| byte == ROUNDS as u8));
    link.write(&[])?;
    assert!(child.wait()?.success());
    Ok(())
}

fn put_everything(name: &str) -> Result<(), Box<dyn std::error::Error>> {
    let link = Link::connect(name)?;
    let mut handle = [0; WindowHandle::BYTES];
    link.read(&mut handle)?;
    let remote = link.attach(WindowHandle::from_bytes(handle)?)?;
    println!("attached a window of {} bytes for {}", remote.len(), remote.rights());

    let mut last = [0; 4];
    for round in 1..=ROUNDS {
        let data = vec![round as u8; DATA_BYTES];
        remote.put_notify(
            DATA as u64,
            &data,
            PutNotification { offset: VARIABLE as u64, value: round },
        )?;
        // Accesses to a window execute in order: this get returns the data of the put above.
        remote.get(DATA as u64, &mut last)?;
        assert_eq!(last, [round as u8; 4]);
        // The owner has read the data: the next round may overwrite it.
        link.read(&mut [])?;
    }

    link.write(&[])?;
    link.read(&mut [])?;
    // The window is withdrawn now, and every access fails.
    match remote.get(DATA as u64, &mut last) {
        Err(error @ Error::Withdrawn) => println!("then: {error}"),
        other => panic!("expected to be told that the window is closed: {other:?}"),
    }
    Ok(())
}
