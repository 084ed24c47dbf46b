//! Finds the definition of a function behind this library in the search order of the program. Unlike
//! `dlsym` it allocates nothing and takes no lock, so that it can run inside the first `malloc`.

use std::ffi::{CStr, c_char, c_int};

/// An object that the loader has loaded: the start of glibc's public `link_map`.
#[repr(C)]
pub(super) struct LinkMap {
    /// The difference between addresses in memory and in the file.
    pub(super) bias: usize,
    /// The path; empty for the program itself.
    pub(super) name: *const c_char,
    dynamic: *const DynamicEntry,
    next: *const LinkMap,
}

#[repr(C)]
struct DynamicEntry {
    tag: usize,
    value: usize,
}

#[repr(C)]
struct LoaderDebug {
    version: c_int,
    first: *const LinkMap,
}

#[repr(C)]
struct Symbol {
    name: u32,
    info: u8,
    other: u8,
    section: u16,
    value: usize,
    size: usize,
}

unsafe extern "C" {
    /// The list of loaded objects, which the loader keeps for debuggers.
    static _r_debug: LoaderDebug;
}

const STRING_TABLE: usize = 5;
const SYMBOL_TABLE: usize = 6;
const GNU_HASH: usize = 0x6fff_fef5;
const SYMBOL_VERSIONS: usize = 0x6fff_fff0;
/// A symbol whose value is a function that returns the address.
const INDIRECT_FUNCTION: u8 = 10;
/// The flag of a version that is not the default one.
const HIDDEN_VERSION: u16 = 0x8000;

/// The tables of an object.
struct Tables {
    strings: *const c_char,
    symbols: *const Symbol,
    versions: *const u16,
    hash: *const u32,
}

/// The address of the next definition of a function, in the objects after this one.
///
/// # Safety
/// All objects must have been relocated, as they are when any code of the program runs, and no other
/// thread may be loading objects: this must run at the start of the program.
pub(super) unsafe fn next_definition(name: &CStr) -> Option<usize> {
    // SAFETY: the loader's list is valid, and does not change meanwhile, as the caller guarantees.
    unsafe {
        let mut object = _r_debug.first;
        while !object.is_null() && (*object).dynamic != own_dynamic() {
            object = (*object).next;
        }
        while let Some(here) = object.as_ref() {
            object = here.next;
            if here.dynamic == own_dynamic() {
                continue;
            }
            if let Some(found) = Tables::of(here).and_then(|tables| tables.find(name, here.bias)) {
                return Some(found);
            }
        }
        None
    }
}

/// Whether the definition of a function that programs use is that of this library.
///
/// # Safety
/// As for [`next_definition`].
pub(super) unsafe fn is_first_here(name: &CStr) -> bool {
    // SAFETY: as above.
    unsafe {
        let mut object = _r_debug.first;
        while let Some(here) = object.as_ref() {
            if Tables::of(here).is_some_and(|tables| tables.find(name, here.bias).is_some()) {
                return here.dynamic == own_dynamic();
            }
            object = here.next;
        }
        false
    }
}

/// The dynamic section of this library, which tells its object from the others.
fn own_dynamic() -> *const DynamicEntry {
    let address: *const DynamicEntry;
    // SAFETY: reads the address of a symbol that the linker defines in every shared library.
    unsafe {
        std::arch::asm!(
            "lea {}, [rip + _DYNAMIC]",
            out(reg) address,
            options(nomem, nostack, preserves_flags)
        );
    }
    address
}

impl Tables {
    /// # Safety
    /// The object must be loaded and relocated.
    unsafe fn of(object: &LinkMap) -> Option<Self> {
        let mut tables = [0usize; 4];
        // SAFETY: the dynamic section of a loaded object ends with an entry of tag 0.
        unsafe {
            let mut entry = object.dynamic;
            while !entry.is_null() && (*entry).tag != 0 {
                let place = match (*entry).tag {
                    STRING_TABLE => 0,
                    SYMBOL_TABLE => 1,
                    SYMBOL_VERSIONS => 2,
                    GNU_HASH => 3,
                    _ => {
                        entry = entry.add(1);
                        continue;
                    }
                };
                // The loader writes addresses over offsets, except into the kernel's own object.
                let value = (*entry).value;
                tables[place] = if value < object.bias { value + object.bias } else { value };
                entry = entry.add(1);
            }
        }
        let [strings, symbols, versions, hash] = tables;
        (strings != 0 && symbols != 0 && hash != 0).then_some(Self {
            strings: strings as *const c_char,
            symbols: symbols as *const Symbol,
            versions: versions as *const u16,
            hash: hash as *const u32,
        })
    }

    /// The address of a function that the object defines in its default version.
    ///
    /// # Safety
    /// The tables must be those of a loaded object with this bias.
    unsafe fn find(&self, name: &CStr, bias: usize) -> Option<usize> {
        let wanted = hash_of(name);
        // SAFETY: the layout of the hash table is that of GNU: four words, a filter of 64-bit words,
        // the buckets, and the chains, whose last element has the lowest bit set.
        unsafe {
            let (buckets, offset, filter) = (*self.hash, *self.hash.add(1), *self.hash.add(2));
            if buckets == 0 {
                return None;
            }
            let bucket_list = self.hash.add(4 + 2 * filter as usize);
            let chains = bucket_list.add(buckets as usize);
            let mut index = *bucket_list.add((wanted % buckets) as usize);
            if index < offset {
                return None;
            }
            loop {
                let hash = *chains.add((index - offset) as usize);
                if hash | 1 == wanted | 1
                    && let Some(found) = self.definition(index as usize, name, bias)
                {
                    return Some(found);
                }
                if hash & 1 == 1 {
                    return None;
                }
                index += 1;
            }
        }
    }

    /// # Safety
    /// As for `find`; the index must be that of a symbol.
    unsafe fn definition(&self, index: usize, name: &CStr, bias: usize) -> Option<usize> {
        // SAFETY: the symbol is in the tables of a loaded object; its name ends with a zero. A
        // resolver of an indirect function may be called once its object is relocated.
        unsafe {
            let symbol = &*self.symbols.add(index);
            let is_default =
                self.versions.is_null() || *self.versions.add(index) & HIDDEN_VERSION == 0;
            let found = CStr::from_ptr(self.strings.add(symbol.name as usize));
            if symbol.section == 0 || !is_default || found != name {
                return None;
            }
            let address = bias + symbol.value;
            if symbol.info & 0xF == INDIRECT_FUNCTION {
                let resolve =
                    std::mem::transmute::<usize, unsafe extern "C" fn() -> usize>(address);
                return Some(resolve());
            }
            Some(address)
        }
    }
}

fn hash_of(name: &CStr) -> u32 {
    let step = |hash: u32, byte: &u8| hash.wrapping_mul(33).wrapping_add(u32::from(*byte));
    name.to_bytes().iter().fold(5381, step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_of_the_c_library_are_found_behind_this_object() {
        for name in [c"memmove", c"memset", c"malloc", c"free"] {
            // SAFETY: no test loads objects.
            let found = unsafe { next_definition(name) };
            // SAFETY: a plain query.
            let expected = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
            assert_eq!(found, Some(expected as usize), "{name:?}");
        }
        // SAFETY: as above.
        assert_eq!(unsafe { next_definition(c"no_such_function_anywhere") }, None);
    }
}
