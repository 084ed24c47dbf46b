//! Raw pointers and cookies: for memory that Rust does not manage.
//!
//! `cargo run --release -p memferry --example raw`

use memferry::{Ferry, Request};

#[allow(clippy::print_stdout, reason = "an example shows something")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    const BYTES: usize = 8 << 20;
    let ferry = Ferry::new()?;
    let source = vec![5u8; BYTES];
    let mut target = vec![0u8; BYTES];

    // SAFETY: both vectors outlive the wait, and nobody touches them before it is over.
    let cookie = unsafe { ferry.icopy(source.as_ptr(), target.as_mut_ptr(), BYTES)? };
    while !ferry.check(cookie)? {
        std::hint::spin_loop();
    }
    ferry.wait(cookie)?;
    assert!(source == target);

    // With a handle instead of a number, and ranges that overlap.
    let start = target.as_mut_ptr();
    // SAFETY: both ranges lie inside the vector, which outlives the wait.
    let transfer = unsafe { ferry.start(Request::copy(start, start.add(1), BYTES - 1))? };
    transfer.wait()?;
    println!("cookie {} and an overlapping copy are done", cookie.to_raw());
    Ok(())
}
