//! What all crates share about settings: the list of variables, the check for unknown ones, and one parser
//! each for sizes and switches.

pub mod size;
pub mod switch;
mod unknown;
pub mod variables;

use std::ffi::OsString;

pub use unknown::{CHECKED_VARIABLES, check_variables, checked_variables, skip_variable_check};

/// Returns the value of a variable of the environment. `None` if it is not set, or if it has nothing but white
/// space: `NAME= program` is how a shell leaves out a variable for one program.
pub fn value_of(name: &str) -> Option<OsString> {
    debug_assert!(variables::is_known(name), "{name} is not in the list of variables");
    std::env::var_os(name).filter(|value| !value.as_encoded_bytes().trim_ascii().is_empty())
}

/// Reads a variable of the environment. `None` as for [`value_of`]; the raw value as the error if `parse`
/// does not accept it without the white space around it.
pub fn read_variable<T>(
    name: &str,
    parse: impl FnOnce(&str) -> Option<T>,
) -> Result<Option<T>, String> {
    let Some(value) = value_of(name) else { return Ok(None) };
    let value = value.to_string_lossy().into_owned();
    match parse(value.trim()) {
        Some(parsed) => Ok(Some(parsed)),
        None => Err(value),
    }
}

/// Whether a switch in the environment is set and off. A value that is no switch is not off.
pub fn is_switched_off(name: &str) -> bool {
    read_variable(name, switch::parse) == Ok(Some(false))
}
