document.getElementById('app').textContent = 'The studio is open.';
