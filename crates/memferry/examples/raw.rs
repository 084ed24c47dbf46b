//! Raw pointers and cookies, for memory that Rust does not manage.
//!
//! `cargo run --release -p memferry --example raw`

use memferry::{Ferry, Request};

#[allow(clippy::print_stdout, reason = "an example shows something")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    const BYTES: usize = 8 << 20;
    let ferry = Ferry::new()?;
    let source = vec![5u8; BYTES];
    let mut target = vec![0u8; BYTES];

    // SAFETY: both vectors outlive the wait, and no other code accesses them before it returns.
    let cookie = unsafe { ferry.icopy_cookie_raw(source.as_ptr(), target.as_mut_ptr(), BYTES)? };
    while !ferry.check(cookie)? {
        std::hint::spin_loop();
    }
    ferry.wait(cookie)?;
    assert!(source == target);

    // A handle instead of a cookie, and ranges that overlap.
    let start = target.as_mut_ptr();
    // SAFETY: both ranges lie inside the vector, which outlives the wait.
    let transfer = unsafe { ferry.start_raw(Request::copy(start, start.add(1), BYTES - 1))? };
    transfer.wait()?;
    println!("cookie {} and an overlapping copy are done", cookie.to_raw());
    Ok(())
}
