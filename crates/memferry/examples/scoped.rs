//! Scoped borrows: copies between borrowed slices, and use of the first bytes while the last ones
//! are in flight.
//!
//! `cargo run --release -p memferry --example scoped`

use memferry::{Error, Ferry, Notification, Options};

#[allow(clippy::print_stdout, reason = "an example shows something")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    const BYTES: usize = 64 << 20;
    const BLOCK: usize = 1 << 20;
    let ferry = Ferry::new()?;
    let source: Vec<u8> = (0..BYTES).map(|at| (at >> 12) as u8).collect();
    let (mut target, mut mirror) = (vec![0u8; BYTES], vec![0u8; BYTES]);
    let finished = Notification::new(0);

    let sum = ferry.scope(|scope| {
        let first = scope.icopy(&source, &mut target)?;
        // A second copy, ordered after the first one, sets a notification variable at completion.
        let options = Options::new().after(&first).notify(&finished, 1);
        let second = scope.icopy_with(&source, &mut mirror, options)?;

        // The program processes the target as it arrives.
        let mut sum = 0u64;
        for start in (0..BYTES).step_by(BLOCK) {
            let block = first.wait_range(start..start + BLOCK)?;
            sum += block.iter().map(|&byte| u64::from(byte)).sum::<u64>();
        }
        second.wait()?;
        Ok::<_, Error>(sum)
    })?;

    assert_eq!(finished.load(), 1);
    assert!(source == target && source == mirror);
    println!("summed {sum} from blocks as they arrived, then made a second copy");
    Ok(())
}
